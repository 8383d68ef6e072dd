"""What the bench command is made of."""
