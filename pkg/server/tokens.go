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
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Scope is what a client may do. Each has what those before it have.
type Scope string

// The scopes.
const (
	Read   Scope = "read"   // look at everything
	Submit Scope = "submit" // submit what the token's Permission allows; cancel, retry and destroy what it submitted
	Admin  Scope = "admin"  // run commands in sessions; manifests with secrets and with paths of this host
)

// Scopes are all of them, the least first.
func Scopes() []Scope { return []Scope{Read, Submit, Admin} }

func (s Scope) allows(need Scope) bool {
	return slices.Index(Scopes(), s) >= slices.Index(Scopes(), need) && slices.Contains(Scopes(), s)
}

// Token is what is kept of a token: the token itself is not.
type Token struct {
	Name      string    `json:"name"`
	Scope     Scope     `json:"scope"`
	SHA256    string    `json:"sha256"`
	CreatedAt time.Time `json:"created_at"`

	task.Permission // to submit; of no meaning for the scope admin, which may submit everything
}

// Tokens is the file of them. Processes may change it while serve runs: what it
// says counts from the next request on.
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

var tokenName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)

// Add makes a token. It is returned once, and nowhere kept.
func (t *Tokens) Add(name string, scope Scope, may task.Permission) (token string, err error) {
	if !tokenName.MatchString(name) {
		return "", fail.New(fail.Usage, "%q is not a token's name: lower case letters, digits and . _ -, at most 64", name).WithHint("agent-sessionizer serve token add ci --scope submit --repo acme/app")
	}
	if !slices.Contains(Scopes(), scope) {
		return "", fail.New(fail.Usage, "%q is not a scope; there are %v", scope, Scopes()).WithHint("agent-sessionizer serve token add %s --scope submit --repo acme/app", name)
	}
	secret := make([]byte, tokenBytes)
	_, _ = rand.Read(secret) // never fails, says crypto/rand
	token = tokenPrefix + base64.RawURLEncoding.EncodeToString(secret)
	return token, t.change(func(all []Token) ([]Token, error) {
		switch {
		case slices.ContainsFunc(all, func(o Token) bool { return o.Name == name }):
			return nil, fail.New(fail.Conflict, "there is a token %s already", name).WithHint("agent-sessionizer serve token remove %s", name)
		case len(all) >= maxTokens:
			return nil, fail.New(fail.Conflict, "there are %d tokens already", len(all)).WithHint("agent-sessionizer serve token list")
		}
		return append(all, Token{Name: name, Scope: scope, SHA256: digest(token), CreatedAt: time.Now().UTC().Truncate(time.Second), Permission: may}), nil
	})
}

// Remove makes a token worthless, also for streams that it opened.
func (t *Tokens) Remove(name string) error {
	return t.change(func(all []Token) ([]Token, error) {
		left := slices.DeleteFunc(slices.Clone(all), func(o Token) bool { return o.Name == name })
		if len(left) == len(all) {
			return nil, fail.New(fail.NotFound, "there is no token %q", name).WithHint("agent-sessionizer serve token list")
		}
		return left, nil
	})
}

// List returns all tokens, as they were made.
func (t *Tokens) List() ([]Token, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.load(); err != nil {
		return nil, err
	}
	return slices.Clone(t.all), nil
}

// find returns the token of that digest. It takes as long for each.
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

func digest(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// change replaces the file by what f makes of its content; one process at a time.
func (t *Tokens) change(f func([]Token) ([]Token, error)) (err error) {
	lock, ok, err := store.TryLock(t.Path + ".lock")
	if err != nil {
		return fail.New(fail.Host, "lock the tokens: %w", err)
	}
	if !ok {
		return fail.New(fail.Conflict, "the tokens are being changed by another command").WithHint("try again")
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
		return fail.New(fail.Host, "write the tokens: %w", err)
	}
	t.seen = nil
	return nil
}

// load reads the file if it is another one than before. It is always replaced
// whole, so that another content is another file.
func (t *Tokens) load() error {
	f, err := os.Open(t.Path)
	if errors.Is(err, fs.ErrNotExist) {
		t.seen, t.all = nil, nil
		return nil
	}
	if err != nil {
		return fail.New(fail.Host, "read the tokens: %w", err).WithHint("ls -l %s", t.Path)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fail.New(fail.Host, "read the tokens: %w", err)
	}
	// A user who can write there is admin, and one who can read there knows at least
	// names. A change of the mode leaves the file's time as it was: it is checked always.
	if sys, ok := st.Sys().(*syscall.Stat_t); st.Mode().Perm()&0o077 != 0 || ok && int(sys.Uid) != os.Geteuid() {
		t.seen, t.all = nil, nil
		return fail.New(fail.Host, "the file of tokens is not this user's alone; no token is accepted").WithHint("chmod 600 %s", t.Path)
	}
	if t.seen != nil && os.SameFile(st, t.seen) && st.ModTime().Equal(t.seen.ModTime()) && st.Size() == t.seen.Size() {
		return nil
	}
	t.seen, t.all = nil, nil
	text, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return fail.New(fail.Host, "read the tokens: %w", err)
	}
	var all []Token
	if err := json.Unmarshal(text, &all); err != nil {
		return fail.New(fail.Host, "read the tokens in %s: %w", t.Path, err).WithHint("rm %s", t.Path)
	}
	t.seen, t.all = st, all
	return nil
}

// bearer is the token of an Authorization header.
func bearer(header string) (string, error) {
	scheme, token, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" || strings.ContainsAny(token, " \t,") {
		return "", fmt.Errorf("the Authorization header is not of the form Bearer TOKEN")
	}
	return token, nil
}
