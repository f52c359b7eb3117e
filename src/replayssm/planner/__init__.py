"""`replayssm plan`: memory and time of decoding a model on a GPU, predicted without one.

gpus       what a GPU can do: bandwidths, costs of launches, and of the kernels as they were measured
kernels    the time of one recurrent layer's step, from the bytes and elements it handles
model      what the rest of a model reads and computes
step       memory of a sequence, sequences that fit, the complete decode step, the best window
"""
