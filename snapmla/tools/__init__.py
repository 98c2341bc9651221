"""Reports on an installation: its state, a bundle's check, a dumped call run again."""
