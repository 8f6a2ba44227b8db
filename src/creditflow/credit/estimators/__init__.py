"""The estimators, one a file. Each file registers its estimator; `base` holds their types and whitening."""
