package session

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// ErrUntrusted is wrapped by the error for a local clone that must be confirmed.
var ErrUntrusted = errors.New("it gets that repository's secrets and saved home only after you confirm it")

// clone identifies a local clone whose own settings name a remote, as a person
// confirmed it. The author of a directory also writes its settings, so the settings
// alone must not give access to what belongs to the remote repository. A different
// directory at the same path has another inode, and must be confirmed too.
type clone struct {
	Path  string `json:"path"`
	Key   string `json:"repo_key"`
	UID   uint32 `json:"uid"`
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
}

// claims reports whether a reference is a directory that names a remote.
func claims(ref repo.Ref) bool { return ref.Path != "" && !strings.HasPrefix(ref.Key, "local:") }

func identify(ref repo.Ref) (clone, error) {
	info, err := os.Lstat(filepath.Join(ref.Path, ".git"))
	if errors.Is(err, fs.ErrNotExist) { // a bare repository
		info, err = os.Lstat(ref.Path)
	}
	if err != nil {
		return clone{}, fail.New(fail.NotFound, "inspect clone: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return clone{}, fail.New(fail.Host, "inspect clone %s: its owner is unknown", ref.Path)
	}
	return clone{Path: ref.Path, Key: ref.Key, UID: st.Uid, Dev: uint64(st.Dev), Inode: st.Ino}, nil //nolint:unconvert // the field has other types on other systems
}

// Clones are the user's local clones, and which of them the user has confirmed.
type Clones struct{ Paths config.Paths }

func (c Clones) file(ref repo.Ref) string {
	sum := sha256.Sum256([]byte(ref.Path + "\x00" + ref.Key))
	return filepath.Join(c.Paths.State, "trusted", hex.EncodeToString(sum[:16])+".json")
}

// Check returns an error that wraps ErrUntrusted when a reference is a local
// clone of a remote repository and was not confirmed with Trust.
func (c Clones) Check(ref repo.Ref) error {
	if !claims(ref) {
		return nil
	}
	is, err := identify(ref)
	if err != nil {
		return err
	}
	var was clone
	text, err := os.ReadFile(c.file(ref))
	if err == nil {
		err = json.Unmarshal(text, &was)
	}
	if err == nil && was == is {
		return nil
	}
	return fail.New(fail.Policy, "%s claims to be a clone of %s; %w", ref.Path, ref.Key, ErrUntrusted).
		WithHint("agent-sessionizer trust %s", ssh.Quote(ref.Path))
}

// Trust records that a person confirmed the remote of a local clone. It may be
// repeated.
func (c Clones) Trust(ref repo.Ref) error {
	if !claims(ref) {
		return nil
	}
	is, err := identify(ref)
	if err != nil {
		return err
	}
	text, err := json.Marshal(is)
	if err != nil {
		return err
	}
	file := c.file(ref)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fail.New(fail.Host, "record confirmed clone: %w", err)
	}
	return writeFile(file, text)
}
