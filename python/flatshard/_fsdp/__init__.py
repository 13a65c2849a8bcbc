"""`fully_shard`: units, their tree, and forwards and backwards of wrapped modules."""
