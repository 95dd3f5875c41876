"""Dataset builders: each one converts the published files of a dataset to rows in the format of `schema.Row`."""
