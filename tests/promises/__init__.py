"""What the library says and leaves behind when it is used wrongly, fails, is watched, or ends."""
