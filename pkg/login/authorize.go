package login

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"strings"

	"golang.org/x/oauth2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Attempt is a login that a user completes in a browser (RFC 6749, 4.1; RFC 7636).
type Attempt struct {
	URL      string // to open
	provider Provider
	verifier string
	state    string
}

// Begin starts a login.
func Begin(p Provider) Attempt {
	a := Attempt{provider: p, verifier: oauth2.GenerateVerifier(), state: rand.Text()}
	c := oauth2.Config{ClientID: p.clientID, RedirectURL: p.redirect, Scopes: strings.Fields(p.scope), Endpoint: oauth2.Endpoint{AuthURL: p.authorizeURL}}
	options := []oauth2.AuthCodeOption{oauth2.S256ChallengeOption(a.verifier)}
	for name, value := range p.authorize {
		options = append(options, oauth2.SetAuthURLParam(name, value))
	}
	a.URL = c.AuthCodeURL(a.state, options...)
	return a
}

// Local returns the address of this host to which the browser is sent with the code, and the path;
// "" if it is sent to a page that shows the code.
func (a Attempt) Local() (addr, path string) {
	u, err := url.Parse(a.provider.redirect)
	if err != nil || u.Scheme != "http" {
		return "", ""
	}
	return "127.0.0.1:" + u.Port(), u.Path
}

var errOther = fail.New(fail.Usage, "that code is of another login; use the page that was opened last")

// Code returns the code in what a user pasted: the code itself, CODE#STATE, or the address to which
// the browser was sent.
func (a Attempt) Code(pasted string) (string, error) {
	code, state, _ := strings.Cut(strings.TrimSpace(pasted), "#")
	if u, err := url.Parse(strings.TrimSpace(pasted)); err == nil && u.Scheme != "" && u.Host != "" {
		code, state = u.Query().Get("code"), u.Query().Get("state")
		if state == "" { // which every address has
			return "", errOther
		}
		if why := u.Query().Get("error"); why != "" && state == a.state {
			return "", fail.New(fail.Secret, "%s refused the login: %.100q", a.provider.Title, why)
		}
	}
	switch {
	case state != "" && state != a.state:
		return "", errOther
	case code == "":
		return "", fail.New(fail.Usage, "that has no code; paste the code, or the address that the browser shows")
	}
	return code, nil
}

// Finish exchanges the code for tokens, and keeps them in this program's file.
func (l Login) Finish(ctx context.Context, a Attempt, code string) error {
	p := a.provider
	got, err := post(ctx, p, map[string]string{
		"grant_type": "authorization_code", "code": code, "state": a.state, "redirect_uri": p.redirect, "client_id": p.clientID, "code_verifier": a.verifier,
	})
	if err != nil {
		return err
	}
	f := file{provider: p.Name, whole: map[string]json.RawMessage{}, tokens: map[string]json.RawMessage{}}
	f.set(p, got)
	if scopes := strings.Fields(got.Scope); p.Name == Claude.Name && len(scopes) > 0 {
		f.tokens["scopes"], _ = json.Marshal(scopes) // texts can be encoded
	}
	return f.write(l.Own)
}

// Forget removes this program's login. The client's own one stays.
func (l Login) Forget() (existed bool, err error) {
	err = os.Remove(l.Own)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
