"""KV memory as bookkeeping: page geometry, allocation, leases, page table. Knows no model and no network."""
