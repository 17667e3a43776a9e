"""Device, host and NVMe memory, and the lanes that move bytes between them."""
