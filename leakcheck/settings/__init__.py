"""Process-wide settings that were changed and not put back: which, by whom, and the code that puts them back."""
