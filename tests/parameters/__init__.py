"""Stage 3 in every habit that models have: units are gathered, released, edited, watched and given back."""
