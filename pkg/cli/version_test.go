package cli

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestVersionCheck(t *testing.T) {
	requests := 0
	feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests++
		_, _ = w.Write([]byte(`{"tag_name": "v1.2.0"}`))
	}))
	defer feed.Close()
	defer func(v string) { app.Version = v }(app.Version)
	for _, c := range []struct {
		version string
		args    []string
		want    string
	}{
		{"v1.1.0", nil, "agent-sessionizer v1.1.0 is older than the newest release, v1.2.0\n"},
		{"v1.2.0", nil, "agent-sessionizer v1.2.0 is up to date: it is the newest release\n"},
		{"v1.3.0", nil, "agent-sessionizer v1.3.0 is newer than the newest release, v1.2.0\n"},
		{"v1.2.0-4-g0123abc", nil, "agent-sessionizer v1.2.0-4-g0123abc is newer than the newest release, v1.2.0\n"},
		{"dev", nil, "agent-sessionizer dev is not a release; the newest release is v1.2.0\n"},
		{"v1.1.0", []string{"--json"}, `"newer": true`},
		{"v1.2.0-4-g0123abc", []string{"--json"}, `"newer": false`},
		{"dev", []string{"--json"}, `"newer": null`},
	} {
		app.Version = c.version
		root, out := testRoot(t)
		root.SetArgs(append([]string{"version", "--check", "--feed", feed.URL}, c.args...))
		if err := root.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), c.want) {
			t.Errorf("version %s %q printed %q, want %q", c.version, c.args, out, c.want)
		}
	}
	if requests != 8 {
		t.Errorf("requests = %d, want one of each check", requests)
	}
	feed.Close()
	root, _ := testRoot(t)
	root.SetArgs([]string{"version", "--check", "--feed", feed.URL})
	err := root.ExecuteContext(t.Context())
	if fail.CodeOf(err) != fail.Host || fail.HintOf(err) != "curl -fsSI "+feed.URL || !strings.Contains(err.Error(), "request latest release") {
		t.Errorf("error without a network = %v (%v, hint %q), want code HOST and the request as hint", err, fail.CodeOf(err), fail.HintOf(err))
	}
}

func TestVersionLicenses(t *testing.T) {
	root, out := testRoot(t)
	root.SetArgs([]string{"version", "--licenses"})
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Apache License", "github.com/lima-vm/lima", "@xterm/xterm", "\nGo\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("licences lack %q", want)
		}
	}
}
