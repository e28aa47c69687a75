"""The path of a gradient, from autograd's hook to the mean that a rank keeps."""
