"""One builder a dataset: the files that people have on disk to rows of one form."""
