"""KV memory: page geometry, allocation, leases, prefix cache, page table. Independent of model and network."""
