"""Datasets from files: what `flatshard.prepare`, `flatshard.import_tokens` and the
program's `generate` share. Needs neither torch nor the extension."""
