"""What a step does with the gradients: clip, update, and the states that it keeps."""
