package login

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

func TestAuthorize(t *testing.T) {
	for _, p := range []*Provider{&Claude, &Codex} {
		t.Run(p.Name, func(t *testing.T) {
			a := Begin(*p)
			page, err := url.Parse(a.URL)
			if err != nil {
				t.Fatal(err)
			}
			q := page.Query()
			if q.Get("code_challenge_method") != "S256" || q.Get("response_type") != "code" || q.Get("redirect_uri") != p.redirect || strings.Contains(a.URL, a.verifier) {
				t.Errorf("page = %s, want the challenge, not the verifier", a.URL)
			}
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ask := map[string]string{}
				if p.Name == "codex" {
					if err := r.ParseForm(); err != nil {
						t.Error(err)
					}
					for name := range r.PostForm {
						ask[name] = r.PostForm.Get(name)
					}
				} else if err := json.NewDecoder(r.Body).Decode(&ask); err != nil {
					t.Error(err)
				}
				if ask["code"] != "the-code" || ask["code_verifier"] != a.verifier || ask["grant_type"] != "authorization_code" {
					w.WriteHeader(http.StatusBadRequest)
					return
				}
				json.NewEncoder(w).Encode(map[string]any{"access_token": "access", "refresh_token": "refresh", "id_token": "id", "expires_in": 3600, "scope": "user:inference user:profile"})
			}))
			defer s.Close()
			a.provider.TokenURL = s.URL
			for pasted, want := range map[string]string{
				"\tthe-code\n":        "the-code",
				"the-code#" + a.state: "the-code",
				p.redirect + "?code=the-code&state=" + a.state: "the-code",
				"the-code#other": "",
				p.redirect + "?code=the-code&state=other":            "",
				p.redirect + "?code=the-code":                        "",
				p.redirect + "?error=access_denied&state=" + a.state: "",
				"":  "",
				"#": "",
			} {
				if got, err := a.Code(pasted); got != want || (err == nil) != (want != "") {
					t.Errorf("code in %q = %q, %v, want %q", pasted, got, err, want)
				}
			}
			home := t.TempDir()
			l := At(*p, filepath.Join(home, "logins"), home)
			if err := l.Finish(t.Context(), a, "another-code"); err == nil {
				t.Error("Finish with a wrong code = nil, want an error")
			}
			if err := l.Finish(t.Context(), a, "the-code"); err != nil {
				t.Fatal(err)
			}
			if st, err := os.Stat(l.Own); err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("mode = %v, %v, want 0600", st.Mode(), err)
			}
			if is, own := l.Exists(); !is || !own {
				t.Errorf("Exists = %t, own %t, want both", is, own)
			}
			if g, err := l.Grant(t.Context(), secret.Value{}); err != nil || g.Access.Reveal() != "access" {
				t.Errorf("Grant = %q, %v, want access", g.Access.Reveal(), err)
			}
			for _, want := range []bool{true, false} {
				if existed, err := l.Forget(); err != nil || existed != want {
					t.Errorf("Forget = %t, %v, want %t", existed, err, want)
				}
			}
		})
	}
	if _, err := Find("gemini"); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Find of an unknown login = %v, want code %s", err, fail.Usage)
	}
}
