"""Parts that both apps need and that have one right answer."""
