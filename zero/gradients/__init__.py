"""From a gradient hook to the mean that a rank keeps."""
