package client

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// TestAnswersWithInvalidIDs answers as a hostile host does: the ids of sessions become parts of paths
// and of commands.
func TestAnswersWithInvalidIDs(t *testing.T) {
	id := ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		one := fmt.Sprintf(`{"id":%q,"name":"agent-acme-app-aaaaaa","state":"ready"}`, id)
		switch {
		case strings.HasSuffix(r.URL.Path, "/progress"):
			fmt.Fprintf(w, `{"session":%s}`, one)
		case r.URL.Path == ops.SessionsPath && r.Method == http.MethodGet:
			fmt.Fprintf(w, `{"sessions":[%s]}`, one)
		default:
			fmt.Fprint(w, one)
		}
	}))
	defer srv.Close()
	c, err := New(Target{URL: srv.URL, Token: "t"})
	if err != nil {
		t.Fatal(err)
	}
	at := ops.SessionPath{ID: "aaaa11112222"}
	asks := map[string]func() error{
		"list":     func() error { _, err := ops.ListSessions.On(t.Context(), c, struct{}{}); return err },
		"find":     func() error { _, err := ops.FindSession.On(t.Context(), c, ops.FindRequest{Name: "app"}); return err },
		"progress": func() error { _, err := ops.GetProgress.On(t.Context(), c, at); return err },
		"create":   func() error { _, err := ops.CreateSession.On(t.Context(), c, ops.CreateRequest{}); return err },
	}
	for name, ask := range asks {
		id = "aaaa11112222"
		if err := ask(); err != nil {
			t.Errorf("%s with a valid id = %v, want no error", name, err)
		}
		for _, id = range []string{"../../tasks/aaaa11112222", "-x", "aaaa11112222?after=oldest", "AAAA11112222"} {
			if err := ask(); err == nil || !strings.Contains(err.Error(), "invalid id") {
				t.Errorf("%s with the id %q = %v, want it refused", name, id, err)
			}
		}
	}
}
