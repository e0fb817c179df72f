"""Models of other projects, one file a format."""
