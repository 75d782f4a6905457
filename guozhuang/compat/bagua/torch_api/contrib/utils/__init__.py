"""Key-value stores in which ``CacheLoader`` keeps samples."""
