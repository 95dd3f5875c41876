"""Dataset builders: one per dataset, each converts published files to rows of one schema."""
