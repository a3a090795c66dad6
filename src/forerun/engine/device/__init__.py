"""The round on the device: fixed shapes, content in device tensors, one small tensor a round for the host to read."""
