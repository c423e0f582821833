package manifest_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
)

// compiled returns the schema as compiled by another library.
func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(manifest.Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("task.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("task.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// value returns a manifest as another library parses it. Its error is a syntax error.
func value(text string) (any, error) {
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		return nil, err
	}
	data, err := json.Marshal(words(v))
	if err != nil {
		return nil, err
	}
	return jsonschema.UnmarshalJSON(bytes.NewReader(data))
}

// words converts keys that are not strings to strings, as JSON requires.
func words(v any) any {
	switch v := v.(type) {
	case map[any]any:
		object := map[string]any{}
		for key, value := range v {
			object[fmt.Sprint(key)] = words(value)
		}
		return object
	case map[string]any:
		for key, value := range v {
			v[key] = words(value)
		}
	case []any:
		for i, value := range v {
			v[i] = words(value)
		}
	}
	return v
}

// TestSchemaAgrees checks that the schema accepts what Parse accepts and refuses what
// Parse refuses. The table marks the problems that a schema cannot detect.
func TestSchemaAgrees(t *testing.T) {
	s := compiled(t)
	good := map[string]string{"minimal": minimal, "everything": everything}
	for name, text := range examples(t) {
		good[name] = string(text)
	}
	for i, more := range []string{
		"{kind: codex, prompt: x, model: gpt-5}", "{kind: command, command: [a, '']}", "{kind: claude, prompt: x, env: {A: ''}}",
	} {
		good[fmt.Sprint("agent ", i)] = unmanned + "agent: " + more
	}
	for i, more := range []string{
		"vm: {session: agent-acme-app-4f2a81}", "vm: {session: '4f2a81c0d9e3'}\nrepository: {subpath: a}\nlifecycle: {failure_action: destroy, hang_action: restart}",
		"vm: {session: acme/app}\nrepository: {url: acme/app}",
	} {
		good[fmt.Sprint("session ", i)] = "version: \"1\"\nkind: Task\nclaude: {prompt: x}\n" + more
	}
	for name, text := range good {
		task := parse(t, text)
		encoded, err := task.Encode()
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{text, string(encoded)} {
			v, err := value(text)
			if err != nil {
				t.Fatalf("read %s: %v", name, err)
			}
			if err := s.Validate(v); err != nil {
				t.Errorf("schema refuses %s: %v, want it accepted", name, err)
			}
		}
	}
	seen := 0
	for _, b := range bads {
		v, err := value(b.text)
		if err != nil {
			continue // a schema would not see it
		}
		seen++
		if accepted := s.Validate(v) == nil; accepted != b.beyond {
			t.Errorf("schema accepts %s = %t, want %t", b.name, accepted, b.beyond)
		}
	}
	if seen < 100 {
		t.Errorf("bad manifests seen by the schema = %d, want at least 100", seen)
	}
}

// TestSchemaSaysAll checks what editors show: every key has a description, no object
// allows unknown keys, and every default is stated.
func TestSchemaSaysAll(t *testing.T) {
	var root map[string]any
	if err := json.Unmarshal(manifest.Schema(), &root); err != nil {
		t.Fatal(err)
	}
	if root["$schema"] != "https://json-schema.org/draft/2020-12/schema" {
		t.Errorf("$schema = %v, want https://json-schema.org/draft/2020-12/schema", root["$schema"])
	}
	defaults := 0
	var walk func(path string, s map[string]any)
	walk = func(path string, s map[string]any) {
		if s["type"] == "object" && s["additionalProperties"] == nil {
			t.Errorf("additionalProperties of %s = none, want it declared", path)
		}
		if items, ok := s["items"].(map[string]any); ok {
			walk(path+"[]", items)
		}
		of, _ := s["properties"].(map[string]any)
		for name, p := range of {
			p, ok := p.(map[string]any)
			if text, _ := p["description"].(string); !ok || !strings.HasSuffix(text, ".") || p["type"] == nil {
				t.Errorf("%s.%s = description %q, type %v, want a sentence and a type", path, name, text, p["type"])
			}
			if p["default"] != nil {
				defaults++
			}
			walk(path+"."+name, p)
		}
	}
	walk("", root)
	if defaults != 28 {
		t.Errorf("defaults = %d, want 28", defaults)
	}
	if !bytes.Equal(manifest.Schema(), manifest.Schema()) {
		t.Error("two calls of Schema differ, want the same bytes")
	}
}
