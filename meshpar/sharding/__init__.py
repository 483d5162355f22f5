"""What becomes of an array: its names and the rules that split them, on which mesh, and the table of all decisions."""
