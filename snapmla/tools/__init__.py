"""Reports on an installation: its state, a check of each op, a dumped call run again."""
