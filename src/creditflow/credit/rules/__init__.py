"""The propagation rules, one a file. Each file registers its rule; `base` holds their common formula."""
