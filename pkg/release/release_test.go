package release_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/release"
)

func TestLatest(t *testing.T) {
	for _, c := range []struct {
		name, body, want, problem string
		status                    int
	}{
		{name: "release", status: 200, body: `{"tag_name": "v1.4.0", "draft": false}`, want: "v1.4.0"},
		{name: "limit", status: 403, body: `{}`, problem: "answered 403"},
		{name: "no release", status: 404, body: `{}`, problem: "answered 404"},
		{name: "not JSON", status: 200, body: `<html>`, problem: "read latest release"},
		{name: "no version", status: 200, body: `{"tag_name": "v1\u001b[2J"}`, problem: "must be a version"},
		{name: "endless", status: 200, body: `{"x": "` + strings.Repeat("x", 2<<20) + `"}`, problem: "read latest release"},
	} {
		t.Run(c.name, func(t *testing.T) {
			requests := 0
			feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				requests++
				w.WriteHeader(c.status)
				_, _ = w.Write([]byte(c.body))
			}))
			defer feed.Close()
			got, err := release.Latest(t.Context(), feed.Client(), feed.URL)
			if got != c.want {
				t.Errorf("latest = %q, want %q", got, c.want)
			}
			switch {
			case err == nil && c.problem != "":
				t.Errorf("error = nil, want %q", c.problem)
			case err != nil && (c.problem == "" || !strings.Contains(err.Error(), c.problem)):
				t.Errorf("error = %q, want %q", err, c.problem)
			case err != nil && strings.Contains(err.Error(), "\x1b"):
				t.Errorf("error = %q, want no control characters", err)
			}
			if requests != 1 {
				t.Errorf("requests = %d, want 1", requests)
			}
		})
	}
}

func TestCompare(t *testing.T) {
	for _, c := range []struct {
		build, release string
		order          int
		known          bool
	}{
		{"v1.3.9", "v1.4.0", -1, true},
		{"1.4.0", "v1.4.0", 0, true},
		{"v1.5.0", "v1.4.0", 1, true},
		{"v1.4.0-rc.1", "v1.4.0", -1, true},
		{"v1.4.0-rc.1-2-g0123abc", "v1.4.0-rc.1", 1, true},
		{"v1.4.0-3-g0123abc", "v1.4.0", 1, true},
		{"v1.4.0-dirty", "v1.4.0", 1, true},
		{"v1.4.0-3-g0123abc-dirty", "v1.4.1", -1, true},
		{"dev", "v1.4.0", 0, false},
		{"0123abc-dirty", "v1.4.0", 0, false},
	} {
		order, known := release.Compare(c.build, c.release)
		if order != c.order || known != c.known {
			t.Errorf("Compare(%q, %q) = %d, %t, want %d, %t", c.build, c.release, order, known, c.order, c.known)
		}
	}
}
