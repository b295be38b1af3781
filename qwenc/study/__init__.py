"""The same text under many settings: what each costs and what it keeps. Nothing here prints."""
