"""Convert published data sets to tasks with verl's columns.

Example: creditflow data gsm8k --from train.jsonl -o train.parquet
"""

EXTRA = "report"
