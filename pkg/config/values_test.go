package config

import (
	"os"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

// TestValuesOfEveryKey checks that Values reports every key of config.yaml and
// resources.yaml.
func TestValuesOfEveryKey(t *testing.T) {
	dir := t.TempDir()
	ship := fstest.MapFS{
		"config.yaml": {Data: []byte(`image: x
limits: {running: 1, memory_reserve: 1GiB, disk_reserve: 1GiB}
network: {mode: open, ports: [443], allow: [a.org], ask: [d.org], deny: [b.org], host_services: ['localhost:1'], enforce: true, http: {A: {deny: ["* /x"]}}}
secrets: {A: env:A}
bindings: {A: {to: [a.org]}}
request_rules: {A: {a.org: {deny: ["* /x"]}}}
`)},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 1GiB, disk: 9GiB}\n")},
		"prices.yaml":           {},
		"network-allowlist.txt": {Data: []byte("c.org\n")},
	}
	c, err := Load(Paths{System: dir + "/etc", Config: dir + "/home", LimaHome: dir}, ship)
	if err != nil {
		t.Fatal(err)
	}
	values, err := c.Values("", "")
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]bool{}
	for _, v := range values {
		if has[v.Key] { // each list has one item
			t.Errorf("Values() contains %s twice, want each key once", v.Key)
		}
		has[v.Key] = true
	}
	for _, key := range leaves(reflect.TypeFor[document](), "") {
		if !has[key] {
			t.Errorf("Values() lacks %s of config.yaml", key)
		}
	}
	for _, key := range leaves(reflect.TypeFor[Resources](), "resources") {
		if !has[key] {
			t.Errorf("Values() lacks %s", key)
		}
	}
}

// leaves returns the keys of a document that are not mappings. It uses one name in
// place of those of secrets, and skips profiles and repos.
func leaves(typ reflect.Type, at string) (keys []string) {
	for i := range typ.NumField() {
		f := typ.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if at != "" {
			name = at + "." + name
		}
		switch {
		case name == "profiles" || name == "repos": // their entries have the same keys
		case name == "secrets" || name == "bindings" || name == "request_rules" || name == "network.http":
			keys = append(keys, name+".A")
		case f.Type.Kind() == reflect.Struct:
			keys = append(keys, leaves(f.Type, name)...)
		default:
			keys = append(keys, name)
		}
	}
	return keys
}

func TestDurationFlag(t *testing.T) {
	for text, want := range map[string]time.Duration{"30d": 30 * 24 * time.Hour, "0d": 0, "12h": 12 * time.Hour, "1h30m": 90 * time.Minute, "1.5d": 36 * time.Hour, "0s": 0} {
		var d Duration
		if err := d.Set(text); err != nil || time.Duration(d) != want {
			t.Errorf("Set(%q) = %v, %v, want %v", text, time.Duration(d), err, want)
		}
	}
	for _, text := range []string{"", "d", "-1d", "-1h", "30", "99999999d", "long"} {
		var d Duration
		if err := d.Set(text); err == nil {
			t.Errorf("Set(%q) = %v, want an error", text, time.Duration(d))
		}
	}
	d := Duration(90 * day)
	if got := d.String(); got != "90d" {
		t.Errorf("String() of 90 days = %q, want %q", got, "90d")
	}
}

// TestDocumentedSettings checks that the documentation has every setting.
func TestDocumentedSettings(t *testing.T) {
	conf, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range settings {
		if _, last, _ := strings.Cut(s.key, "."); !strings.Contains(string(conf), "`"+s.key+"`") && (last == "" || !strings.Contains(string(conf), last+":")) {
			t.Errorf("docs/configuration.md lacks the setting %s", s.key)
		}
	}
}
