package server

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// parsePlist reads a property list as plist(5) describes it: strictly, with keys and values in turn.
func parsePlist(text []byte) (any, error) {
	d := xml.NewDecoder(bytes.NewReader(text))
	var root any
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return root, nil
		}
		if err != nil {
			return nil, err
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		if start.Name.Local != "plist" || root != nil {
			return nil, fmt.Errorf("element %s at the top", start.Name.Local)
		}
		values, err := plistValues(d)
		if err != nil {
			return nil, err
		}
		if len(values) != 1 {
			return nil, fmt.Errorf("plist has %d values", len(values))
		}
		root = values[0]
	}
}

// plistKey is a key of a dictionary.
type plistKey string

// plistValues reads values up to the end of their element.
func plistValues(d *xml.Decoder) (values []any, err error) {
	for {
		token, err := d.Token()
		if err != nil {
			return nil, err
		}
		switch token := token.(type) {
		case xml.EndElement:
			return values, nil
		case xml.CharData:
			if strings.TrimSpace(string(token)) != "" {
				return nil, fmt.Errorf("text %q between elements", token)
			}
		case xml.StartElement:
			v, err := plistValue(d, token)
			if err != nil {
				return nil, err
			}
			values = append(values, v)
		}
	}
}

func plistValue(d *xml.Decoder, start xml.StartElement) (any, error) {
	var text string
	switch name := start.Name.Local; name {
	case "true", "false":
		return name == "true", d.Skip()
	case "key", "string", "integer":
		if err := d.DecodeElement(&text, &start); err != nil {
			return nil, err
		}
		switch name {
		case "key":
			return plistKey(text), nil
		case "integer":
			return strconv.Atoi(text)
		}
		return text, nil
	case "array":
		return plistValues(d)
	case "dict":
		values, err := plistValues(d)
		if err != nil {
			return nil, err
		}
		dict := map[string]any{}
		for len(values) > 1 {
			key, ok := values[0].(plistKey)
			if _, twice := dict[string(key)]; !ok || twice {
				return nil, fmt.Errorf("%v is not a key, or not the only one", values[0])
			}
			dict[string(key)], values = values[1], values[2:]
		}
		if len(values) > 0 {
			return nil, fmt.Errorf("key %v has no value", values[0])
		}
		return dict, nil
	default:
		return nil, fmt.Errorf("element %s", name)
	}
}

// TestLaunchdAgent checks the whole agent with arguments that mean something in XML.
func TestLaunchdAgent(t *testing.T) {
	argv := []string{
		"/Applications/My App/agent-sessionizer", "serve", "--listen", "127.0.0.1:8122", "", " blanks ", "a\tb\nc\rd", "<&>\"'", "</string><string>-x", "]]>", "<!--", "&amp;", "%d {{.Log}}", "ü 日本 🙂",
	}
	const log = "/Users/a & b/</string>/log"
	text, err := LaunchdAgent(argv, log)
	if err != nil {
		t.Fatal(err)
	}
	got, err := parsePlist(text)
	if err != nil {
		t.Fatalf("parse agent: %v\n%s", err, text)
	}
	var arguments []any
	for _, a := range argv {
		arguments = append(arguments, a)
	}
	files := func(n int) any { return map[string]any{"NumberOfFiles": n} }
	want := map[string]any{
		"Label": "io.agent-sessionizer.serve", "ProgramArguments": arguments, "RunAtLoad": true,
		"KeepAlive": map[string]any{"SuccessfulExit": false}, "AbandonProcessGroup": true,
		"SoftResourceLimits": files(65536), "HardResourceLimits": files(1048576),
		"Umask": 0o077, "ExitTimeOut": 30, "StandardErrorPath": log,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("agent (-want +got):\n%s", diff)
	}
}

// TestLaunchdAgentRefuses checks that no argument is replaced by one that XML can contain.
func TestLaunchdAgentRefuses(t *testing.T) {
	for _, text := range []string{"a\x00", "\x1b[31m", "\xff", "/\xed\xa0\x80", "\uffff"} {
		if agent, err := LaunchdAgent([]string{"/bin/x", text}, "/log"); fail.CodeOf(err) != fail.Usage {
			t.Errorf("LaunchdAgent with the argument %q = %q, %v, want code %v", text, agent, err, fail.Usage)
		}
		if agent, err := LaunchdAgent([]string{"/bin/x"}, text); fail.CodeOf(err) != fail.Usage {
			t.Errorf("LaunchdAgent with the log %q = %q, %v, want code %v", text, agent, err, fail.Usage)
		}
	}
}
