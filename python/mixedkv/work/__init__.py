"""Work that is not a step: threads and processes in fair turns of tenants, with a clock and limits."""
