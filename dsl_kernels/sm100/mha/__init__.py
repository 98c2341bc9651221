"""Dense MHA prefill on datacenter Blackwell."""
