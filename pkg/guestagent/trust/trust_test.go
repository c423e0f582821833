package trust

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

func TestSet(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	path := g.Path(bundle)
	const others = "# of others, without a newline at the end"
	if err := sys.WriteFile(path, []byte(others), 0o644); err != nil {
		t.Fatal(err)
	}
	var last []byte
	for range 3 {
		a, err := intercept.NewAuthority([]string{"example.org"})
		if err != nil {
			t.Fatal(err)
		}
		last = a.PEM()
		for range 2 { // the second call changes nothing
			if err := Set(t.Context(), g, bytes.NewReader(last)); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(path)
			if diff := cmp.Diff(others+"\n"+string(last), string(got)); err != nil || diff != "" {
				t.Errorf("bundle = %v (-want +got):\n%s", err, diff)
			}
		}
	}
	for name, text := range map[string]string{
		"empty": "", "no PEM": "text", "no certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
	} {
		if err := Set(t.Context(), g, strings.NewReader(text)); err == nil {
			t.Errorf("Set of %s = nil, want an error", name)
		}
	}
	if got, err := os.ReadFile(g.Path(ownFile)); err != nil || !bytes.Equal(got, last) {
		t.Errorf("certificate after errors = %s, %v, want the last", got, err)
	}
}

func TestContainer(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "config.json")
	read := func() (c struct {
		Version string           `json:"ociVersion"`
		Mounts  []map[string]any `json:"mounts"`
		Process struct{ Env []string }
		Linux   json.RawMessage
	},
	) {
		t.Helper()
		text, err := os.ReadFile(config)
		if err == nil {
			err = json.Unmarshal(text, &c)
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	const before = `{"ociVersion": "1.2.0", "mounts": [{"destination": "/proc"}], "process": {"env": ["PATH=/bin", "SSL_CERT_FILE=/own"]}, "linux": {"resources":{"memory":{"limit":9223372036854775807}}}}`
	for _, args := range [][]string{
		{"--root", "/run/x", "create", "--bundle", dir, "--pid-file", "p", "id"},
		{"run", "--bundle=" + dir, "id"},
		{"run", "-b", dir, "id"},
	} {
		if err := os.WriteFile(config, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := changeContainer(args); err != nil {
			t.Fatal(err)
		}
		c := read()
		if c.Version != "1.2.0" || len(c.Mounts) != 2 || c.Mounts[1]["destination"] != inContainer || string(c.Linux) != `{"resources":{"memory":{"limit":9223372036854775807}}}` {
			t.Errorf("config.json after %q = %+v, want a second mount, and the rest as before", args, c)
		}
		env := c.Process.Env
		if len(env) != 1+len(Variables) || !slices.Contains(env, "SSL_CERT_FILE=/own") || !slices.Contains(env, "NODE_EXTRA_CA_CERTS="+inContainer) {
			t.Errorf("environment after %q = %q, want all of %q, and its own SSL_CERT_FILE", args, env, Variables)
		}
	}
	process := filepath.Join(dir, "process.json")
	if err := os.WriteFile(process, []byte(`{"terminal":true}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := changeContainer([]string{"exec", "--process", process, "id"}); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(process); err != nil || !strings.Contains(string(text), "SSL_CERT_FILE="+inContainer) {
		t.Errorf("process.json = %s, %v, want SSL_CERT_FILE in it", text, err)
	}
	for _, args := range [][]string{{"kill", "id"}, {"--version"}, {}} {
		if err := changeContainer(args); err != nil {
			t.Errorf("changeContainer(%q) = %v, want nil", args, err)
		}
	}
	if err := changeContainer([]string{"create", "id"}); err == nil {
		t.Error("changeContainer without a config.json = nil, want an error")
	}
}

// TestVariables checks that programs in the guest have the same variables as those in containers.
func TestVariables(t *testing.T) {
	text, err := os.ReadFile("../../../provision/files/profile.sh")
	if err != nil || !strings.Contains(string(text), "for name in "+strings.Join(Variables, " ")+";") {
		t.Errorf("provision/files/profile.sh = %v, want %q in it", err, Variables)
	}
}
