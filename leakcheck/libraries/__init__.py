"""What libraries take on first use and keep for the process: no leak of whoever used them first."""
