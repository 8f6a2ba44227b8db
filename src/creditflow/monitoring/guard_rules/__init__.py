"""The kinds of guard rule, one a file. Each file registers its kind; `base` holds their interface and checks."""
