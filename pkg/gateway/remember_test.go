package gateway

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// A gateway that is started again uses the certificate authority and the placeholders that programs
// in the guest have read. The values of secrets are not written.
func TestRemember(t *testing.T) {
	file := filepath.Join(t.TempDir(), "remember.json")
	secrets := func(names ...string) (all []Secret) {
		for _, name := range names {
			all = append(all, Secret{Name: name, Like: "ghp_", Value: secret.NewValue(realToken), Hosts: []string{"example.com"}})
		}
		return all
	}
	run := func(each ...[]Secret) (x Interception) {
		t.Helper()
		g, err := New(Options{Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: guestMAC, MTU: 1500, Log: func(Record) {}, Remember: file})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		for _, s := range each {
			if x, err = g.SetSecrets(s); err != nil {
				t.Fatal(err)
			}
		}
		return x
	}
	first := run(secrets("ONE"))
	if again := run(nil, secrets("TWO"), secrets("TWO", "ONE")); string(again.Certificate) != string(first.Certificate) || again.Placeholders["ONE"] != first.Placeholders["ONE"] {
		t.Errorf("what the guest gets of the next gateway = %s", cmp.Diff(first, again))
	}
	text, err := os.ReadFile(file)
	if err != nil || strings.Contains(string(text), realToken) {
		t.Errorf("%s = %s, %v, want no secret", file, text, err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode of %s = %v, %v, want 0600", file, st.Mode(), err)
	}
	for _, damaged := range []string{"", "{}", `{"authority": {"hosts": ["example.com"], "certificate": "AAAA", "key": "AAAA"}}`} {
		if err := os.WriteFile(file, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if x := run(secrets("ONE")); len(x.Certificate) == 0 || x.Placeholders["ONE"] == first.Placeholders["ONE"] {
			t.Errorf("what the guest gets after %q = %+v, want another certificate and placeholder", damaged, x)
		}
	}
}

// A gateway knows the addresses of the names that the one before it has answered.
func TestNamesStay(t *testing.T) {
	now := time.Now()
	was := newNameTable(func() time.Time { return now })
	addresses := map[string]netip.Addr{}
	for _, name := range []string{"old.example.", "one.example.", "two.example."} {
		addresses[name], _ = was.addr(name)
		if name == "old.example." {
			now = now.Add(nameMemory)
		}
	}
	file := filepath.Join(t.TempDir(), namesFile)
	if err := writeNames(file, was.recentNames()); err != nil {
		t.Fatal(err)
	}
	g, err := New(Options{Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: guestMAC, MTU: 1500, Log: func(Record) {}, Names: readNames(file)})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for name, addr := range addresses {
		want := name
		if name == "old.example." {
			want = ""
		}
		if got := g.names.name(addr); got != want {
			t.Errorf("name of %v = %q, want %q", addr, got, want)
		}
	}
	if names := readNames(filepath.Join(t.TempDir(), namesFile)); names != nil {
		t.Errorf("names without a file = %v, want none", names)
	}
}
