package guestproto_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

func TestStatusRoundTrip(t *testing.T) {
	s := guestproto.Status{
		Version:  guestproto.Version,
		Policy:   guestproto.Policy{Mode: "allowlist", Names: 3},
		Firewall: guestproto.Firewall{Loaded: true},
		DNS:      guestproto.DNS{Listen: "127.0.0.1:53", Upstream: []string{"192.168.5.3\x1b[2J"}},
	}
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	got, err := guestproto.DecodeStatus(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if !got.Ready() || got.DNS.Upstream[0] != "192.168.5.3\ufffd[2J" {
		t.Errorf("status = %+v, want ready, with upstream %q", got, "192.168.5.3\ufffd[2J")
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, bad := range []string{
		"", "null null", `{"version":2}`, `{"version":1}{"version":1}`, `{"version":1,"surprise":true}`,
		`{"version":1,"program":"` + strings.Repeat("x", guestproto.MaxStatus) + `"}`,
	} {
		if _, err := guestproto.DecodeStatus(strings.NewReader(bad)); err == nil {
			t.Errorf("DecodeStatus(%.60q) succeeded, want an error", bad)
		}
	}
	_, err := guestproto.DecodeSecrets(strings.NewReader(`{"version":1,"env":{"A":"hunter2"},"hunter2":1}`))
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("DecodeSecrets: error %v, want one without the secret", err)
	}
}

func TestSecretsShowOnlyWhenEncoded(t *testing.T) {
	s := guestproto.Secrets{Env: map[string]string{"KEY": "hunter2\nline"}, Token: "hunter2"}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("secrets", "set", s)
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if shown := fmt.Sprintf("%v %+v %#v %s %s %s", s, s, s, s, data, log.String()); strings.Contains(shown, "hunter2") {
		t.Errorf("formatted secrets = %s, want them without the values", shown)
	}
	var sent bytes.Buffer
	if err := s.Encode(&sent); err != nil {
		t.Fatal(err)
	}
	got, err := guestproto.DecodeSecrets(&sent)
	if err != nil || got.Env["KEY"] != "hunter2\nline" || got.Token != "hunter2" {
		t.Errorf("DecodeSecrets() = %q, token %q, %v, want the values that were encoded", got.Env, got.Token, err)
	}
}

func TestQueries(t *testing.T) {
	log := `{"seq":1,"time":"2026-01-02T03:04:05Z","name":"a\u001b]0;x\u0007.com","type":"A","allowed":false,"reason":"\u202eno","source":"f\u001b:1","process":"sh\u001b[2J"}

{"seq":2,"time":"2026-01-02T03:04:05Z","name":"b.com","type":"A","allowed":true}
not json`
	var got []guestproto.Query
	var failed error
	for q, err := range guestproto.Queries(strings.NewReader(log)) {
		if err != nil {
			failed = err
			break
		}
		got = append(got, q)
	}
	if len(got) != 2 || failed == nil {
		t.Fatalf("Queries() = %+v, %v, want 2 queries and an error", got, failed)
	}
	if q := got[0]; q.Name != "a\ufffd]0;x\ufffd.com" || q.Reason != "\ufffdno" || q.Source != "f\ufffd:1" || q.Process != "sh\ufffd[2J" {
		t.Errorf("first query = %+v, want it without control characters", q)
	}
	for _, err := range guestproto.Queries(strings.NewReader(strings.Repeat("x", guestproto.MaxQuery+10))) {
		if err == nil {
			t.Error("Queries() of an endless line succeeded, want an error")
		}
	}
}

func FuzzClean(f *testing.F) {
	f.Add("a\x1b[2J\xff\u202e")
	f.Fuzz(func(t *testing.T, s string) {
		got := guestproto.Clean(s)
		if !utf8.ValidString(got) || len(got) > 1024+3 || strings.ContainsAny(got, "\x1b\n\r\x00\u202e\u009b") {
			t.Fatalf("Clean(%q) = %q (%d bytes), want at most 1027 bytes of UTF-8 without control characters", s, got, len(got))
		}
	})
}

// The guest accepts every set of secrets that the host lets pass.
func TestSecretsOfTheLargestSize(t *testing.T) {
	set := guestproto.Secrets{Env: map[string]string{}, Token: strings.Repeat("f", 64)}
	for i := range guestproto.MaxSecrets {
		set.Env[fmt.Sprintf("NAME_%d", i)] = strings.Repeat("<\n\"", guestproto.MaxSecretBytes/3)
	}
	var sent bytes.Buffer
	if err := set.Encode(&sent); err != nil {
		t.Fatal(err)
	}
	if got, err := guestproto.DecodeSecrets(&sent); err != nil || len(got.Env) != guestproto.MaxSecrets {
		t.Fatalf("DecodeSecrets() = %d values, %v, want %d", len(got.Env), err, guestproto.MaxSecrets)
	}
}
