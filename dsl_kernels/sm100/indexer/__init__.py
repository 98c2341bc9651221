"""The indexer's scores on datacenter Blackwell."""
