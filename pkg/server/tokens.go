package server

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Token is the stored form of a token, which does not include the token itself.
type Token struct {
	Name      string    `json:"name"`
	Scope     ops.Scope `json:"scope"`
	SHA256    string    `json:"sha256"`
	CreatedAt time.Time `json:"created_at"`

	task.Permission // what it may submit; unused for the scope admin, which may submit everything
}

// Tokens is the file of tokens. Other processes may change it while serve runs; a
// change applies from the next request.
type Tokens struct {
	Path string

	mu   sync.Mutex
	seen fs.FileInfo // the file that all was read from
	all  []Token
}

const (
	tokenPrefix = "asz_"
	tokenBytes  = 32
	maxTokens   = 1000
	maxTokenLen = 256
)

var tokenName = lazyregexp.New(`^[a-z0-9][a-z0-9._-]{0,63}$`)

// Add creates a token and returns it. The token itself is not stored anywhere.
func (t *Tokens) Add(name string, scope ops.Scope, may task.Permission) (token string, err error) {
	if !tokenName.MatchString(name) {
		return "", fail.New(fail.Usage, "token name must be at most 64 lower-case letters, digits and . _ -, got %q", name).WithHint("agent-sessionizer serve token add ci --scope submit --repo acme/app")
	}
	if !slices.Contains(ops.Scopes(), scope) {
		return "", fail.New(fail.Usage, "scope must be one of %v, got %q", ops.Scopes(), scope).WithHint("agent-sessionizer serve token add %s --scope submit --repo acme/app", name)
	}
	secret := make([]byte, tokenBytes)
	_, _ = rand.Read(secret) // documented never to fail
	token = tokenPrefix + base64.RawURLEncoding.EncodeToString(secret)
	return token, t.change(func(all []Token) ([]Token, error) {
		switch {
		case slices.ContainsFunc(all, func(o Token) bool { return o.Name == name }):
			return nil, fail.New(fail.Conflict, "token %s already exists", name).WithHint("agent-sessionizer serve token remove %s", name)
		case len(all) >= maxTokens:
			return nil, fail.New(fail.Conflict, "limit of %d tokens reached", len(all)).WithHint("agent-sessionizer serve token list")
		}
		return append(all, Token{Name: name, Scope: scope, SHA256: digest(token), CreatedAt: time.Now().UTC().Truncate(time.Second), Permission: may}), nil
	})
}

// Remove revokes a token, also for streams that it opened.
func (t *Tokens) Remove(name string) error {
	return t.change(func(all []Token) ([]Token, error) {
		left := slices.DeleteFunc(slices.Clone(all), func(o Token) bool { return o.Name == name })
		if len(left) == len(all) {
			return nil, fail.New(fail.NotFound, "no token %q", name).WithHint("agent-sessionizer serve token list")
		}
		return left, nil
	})
}

// List returns all tokens in the order of their creation.
func (t *Tokens) List() ([]Token, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.load(); err != nil {
		return nil, err
	}
	return slices.Clone(t.all), nil
}

// find returns the stored token for a presented one. It takes the same time for
// every token.
func (t *Tokens) find(presented string) (Token, bool, error) {
	all, err := t.List()
	if err != nil || len(presented) > maxTokenLen {
		return Token{}, false, err
	}
	sum := []byte(digest(presented))
	found := -1
	for i := range all {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum, []byte(all[i].SHA256)), i, found)
	}
	if found < 0 {
		return Token{}, false, nil
	}
	return all[found], true, nil
}

// withDigest returns the token with that SHA-256.
func (t *Tokens) withDigest(sum string) (Token, bool, error) {
	all, err := t.List()
	if err != nil {
		return Token{}, false, err
	}
	i := slices.IndexFunc(all, func(o Token) bool { return o.SHA256 == sum })
	if i < 0 {
		return Token{}, false, nil
	}
	return all[i], true, nil
}

func digest(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// change replaces the file with f's result for its content. Only one process can
// change the file at a time.
func (t *Tokens) change(f func([]Token) ([]Token, error)) (err error) {
	lock, ok, err := lockfile.Try(t.Path + ".lock")
	if err != nil {
		return fail.New(fail.Host, "lock tokens: %w", err)
	}
	if !ok {
		return fail.New(fail.Conflict, "another command is changing the tokens").WithHint("try again")
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.load(); err != nil {
		return err
	}
	all, err := f(slices.Clone(t.all))
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(t.Path, append(text, '\n'), 0o600); err != nil {
		return fail.New(fail.Host, "write tokens: %w", err)
	}
	t.seen = nil
	return nil
}

// load reads the file if it has changed. The file is always replaced whole, so
// changed content means another file.
func (t *Tokens) load() error {
	f, err := os.Open(t.Path)
	if errors.Is(err, fs.ErrNotExist) {
		t.seen, t.all = nil, nil
		return nil
	}
	if err != nil {
		return fail.New(fail.Host, "read tokens: %w", err).WithHint("ls -l %s", t.Path)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fail.New(fail.Host, "read tokens: %w", err)
	}
	// A user who can write the file is an admin, and one who can read it learns at
	// least the names. Check the mode every time, because changing it does not
	// change the file's modification time.
	if sys, ok := st.Sys().(*syscall.Stat_t); st.Mode().Perm()&0o077 != 0 || ok && int(sys.Uid) != os.Geteuid() {
		t.seen, t.all = nil, nil
		return fail.New(fail.Host, "other users can access the token file; no token is accepted").WithHint("chmod 600 %s", t.Path)
	}
	if t.seen != nil && os.SameFile(st, t.seen) && st.ModTime().Equal(t.seen.ModTime()) && st.Size() == t.seen.Size() {
		return nil
	}
	t.seen, t.all = nil, nil
	text, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return fail.New(fail.Host, "read tokens: %w", err)
	}
	var all []Token
	if err := json.Unmarshal(text, &all); err != nil {
		return fail.New(fail.Host, "read tokens in %s: %w", t.Path, err).WithHint("rm %s", t.Path)
	}
	t.seen, t.all = st, all
	return nil
}

// bearer returns the token of an Authorization header.
func bearer(header string) (string, error) {
	scheme, token, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" || strings.ContainsAny(token, " \t,") {
		return "", fmt.Errorf("the Authorization header must be Bearer TOKEN")
	}
	return token, nil
}
