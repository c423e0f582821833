// Package secrets holds the session's secrets in memory-backed files for the agent alone, and
// answers git's credential requests from them. It never writes a secret to a disk.
package secrets

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	// Linux refuses to start a program with a variable over 128 KiB, or with too
	// many bytes of variables in total. Larger secrets are available only as files.
	maxVariable    = 96 << 10
	maxEnvironment = 512 << 10
	current        = "current" // link to the current set
)

// MakeDir creates the directory of the secrets, for the agent alone. Only
// root can write to /run, so the daemon creates the directory before the agent
// needs it.
func MakeDir(g sys.Guest) error {
	dir := g.Path(sys.SecretDir)
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrNotExist) { // a fake guest's first start
		err = os.MkdirAll(dir, 0o700)
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil && !g.Fake {
		err = os.Lchown(dir, sys.AgentUID, groupOf(sys.AgentUID))
	}
	return err
}

func groupOf(uid int) int {
	for line := range strings.Lines(sys.Text("/etc/passwd")) {
		f := strings.Split(line, ":")
		if len(f) > 3 && f[2] == strconv.Itoa(uid) {
			if gid, err := strconv.Atoi(f[3]); err == nil {
				return gid
			}
		}
	}
	return uid
}

// Set replaces the set of secrets. It completes the new set before it
// removes the old one. No error quotes a value.
func Set(g sys.Guest, in io.Reader) error {
	set, err := guestproto.DecodeSecrets(in)
	if err != nil {
		return fail.New(fail.Secret, "%w", err)
	}
	if err := checkSecrets(set); err != nil {
		return err
	}
	dir, err := open(g, true)
	if err != nil {
		return err
	}
	defer dir.Close()
	generation := "." + strconv.FormatInt(time.Now().UnixNano(), 36)
	if err := dir.writeGeneration(generation, set); err != nil {
		return errors.Join(err, dir.wipe(generation))
	}
	if err := dir.link(generation, current); err != nil {
		return err
	}
	for _, name := range []string{"secrets", "env", "token"} {
		if err := dir.link(current+"/"+name, name); err != nil {
			return err
		}
	}
	return dir.sweep(generation)
}

// Wipe overwrites and removes every secret. It succeeds if there are none.
func Wipe(g sys.Guest) error {
	dir, err := open(g, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	for _, name := range []string{"secrets", "env", "token", current} {
		if err := dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("wipe secrets: %w", err)
		}
	}
	return dir.sweep("")
}

func checkSecrets(set guestproto.Secrets) error {
	if len(set.Env) > guestproto.MaxSecrets {
		return fail.New(fail.Secret, "%d secrets are more than the limit of %d", len(set.Env), guestproto.MaxSecrets)
	}
	for name, value := range set.Env {
		if !envName(name) {
			return fail.New(fail.Secret, "secret %q: must be the name of an environment variable of A-Z, 0-9 and _", guestproto.Clean(name))
		}
		if len(value) > guestproto.MaxSecretBytes {
			return fail.New(fail.Secret, "secret %s is larger than the limit of %d KiB", name, guestproto.MaxSecretBytes>>10)
		}
		if strings.Contains(value, "\x00") {
			return fail.New(fail.Secret, "secret %s contains a zero byte, which environment variables do not support", name)
		}
	}
	if strings.ContainsAny(set.Token, "\x00\r\n") {
		return fail.New(fail.Secret, "the session's token must be one line")
	}
	return nil
}

func envName(s string) bool {
	return s != "" && len(s) <= 128 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789") == "" && (s[0] < '0' || s[0] > '9')
}

// dir is /run/agent. Its content belongs to the agent, so root works in it
// only through an os.Root, which follows no link out of the directory.
type dir struct {
	*os.Root
	uid, gid int // owner of created files, -1 for the process's own user
}

func open(g sys.Guest, create bool) (*dir, error) {
	path := g.Path(sys.SecretDir)
	if create && (g.Fake || os.Geteuid() == 0) {
		if err := MakeDir(g); err != nil {
			return nil, fail.New(fail.Secret, "create %s: %w", sys.SecretDir, err)
		}
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil, fail.New(fail.Secret, "%s: %w", sys.SecretDir, err).WithHint("sudo systemctl restart agent-guest")
	}
	if !info.IsDir() || info.Mode().Perm() != 0o700 {
		return nil, fail.New(fail.Secret, "%s must be a directory that only its owner can access; secrets were not written", sys.SecretDir).WithHint("sudo rm -r %s", sys.SecretDir)
	}
	if !g.Fake {
		if err := inMemory(path); err != nil {
			return nil, fail.New(fail.Secret, "%s must be in memory: %w", sys.SecretDir, err)
		}
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fail.New(fail.Secret, "%w", err)
	}
	d := &dir{Root: root, uid: -1, gid: -1}
	if !g.Fake && os.Geteuid() == 0 {
		d.uid, d.gid = sys.AgentUID, groupOf(sys.AgentUID)
	}
	return d, nil
}

// writeGeneration writes a set into a new directory.
func (d *dir) writeGeneration(generation string, set guestproto.Secrets) error {
	for _, name := range []string{generation, filepath.Join(generation, "secrets")} {
		if err := errors.Join(d.Mkdir(name, 0o700), d.Lchown(name, d.uid, d.gid)); err != nil {
			return fmt.Errorf("write secrets: %w", err)
		}
	}
	files := map[string]string{"env": shellEnv(set.Env), "token": set.Token}
	for name, value := range set.Env {
		files["secrets/"+name] = value
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		f, err := d.OpenFile(filepath.Join(generation, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("write secrets: %w", err)
		}
		_, err = io.WriteString(f, files[name])
		if err := errors.Join(err, f.Chown(d.uid, d.gid), f.Close()); err != nil {
			return fmt.Errorf("write secrets: %w", err)
		}
	}
	return nil
}

// link replaces a link atomically.
func (d *dir) link(target, name string) error {
	next := "." + name + ".next"
	if err := d.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write secrets: %w", err)
	}
	if err := errors.Join(d.Symlink(target, next), d.Lchown(next, d.uid, d.gid), d.Rename(next, name)); err != nil {
		return fmt.Errorf("write secrets: %w", err)
	}
	return nil
}

// sweep wipes every set except one, including the leftovers of a crash.
func (d *dir) sweep(keep string) error {
	entries, err := fs.ReadDir(d.FS(), ".")
	if err != nil {
		return fmt.Errorf("wipe secrets: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), ".") && e.Name() != keep {
			errs = append(errs, d.wipe(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// wipe overwrites the files of a set and removes the set.
func (d *dir) wipe(generation string) error {
	zeros := make([]byte, 64<<10)
	walk := func(name string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := d.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		info, err := f.Stat()
		for left := int64(0); err == nil && left < info.Size(); {
			var n int
			n, err = f.Write(zeros[:min(int64(len(zeros)), info.Size()-left)])
			left += int64(n)
		}
		return errors.Join(err, f.Close())
	}
	err := fs.WalkDir(d.FS(), generation, walk)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err := errors.Join(err, d.RemoveAll(generation)); err != nil {
		return fmt.Errorf("wipe secrets: %w", err)
	}
	return nil
}

// shellEnv returns the secrets as a file that a POSIX shell can source.
func shellEnv(env map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(env)) {
		value := env[name]
		if len(value) > maxVariable || b.Len()+len(value) > maxEnvironment {
			fmt.Fprintf(&b, "# %s is too large for the environment; read %s/secrets/%s\n", name, sys.SecretDir, name)
			continue
		}
		fmt.Fprintf(&b, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	return b.String()
}
