"""Pure machines of the collective layer: no IO, no clock, no tensors."""
