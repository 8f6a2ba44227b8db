import json

from creditflow.cli.schema import schema
from creditflow.config.schema import json_schema


def test_schema_prints_the_json_schema(capsys):
    schema()

    assert json.loads(capsys.readouterr().out) == json_schema()
