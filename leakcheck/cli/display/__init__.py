"""What a terminal shows while a life runs."""
