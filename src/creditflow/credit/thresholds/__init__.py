"""The kinds of threshold, one a file. Each file registers its kind; `base` holds their interface and checks."""
