"""All workers computed in one pass: for GPUs, where many small batches would leave most of the device idle."""
