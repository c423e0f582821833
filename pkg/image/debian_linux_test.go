//go:build !vmtest

package image

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The users of TestBuildDirectoryIsTheUsersOwn when it runs as root.
const (
	builderUID  = 65533
	attackerUID = 65534
)

// buildAsUser is the variable that makes this binary run one build, with the programs
// in PATH. Before each step it prints the step's name and waits for a line.
const buildAsUser = "AGENT_TEST_BUILD_DIR"

func TestMain(m *testing.M) {
	dir := os.Getenv(buildAsUser)
	if dir == "" {
		os.Exit(m.Run())
	}
	o := options("true")
	o.Suite = DefaultSuite
	o.Arch = "x86_64"
	answers := bufio.NewReader(os.Stdin)
	o.Progress = func(line string) {
		fmt.Println(line)
		_, _ = answers.ReadString('\n')
	}
	if err := buildDebian(context.Background(), dir, o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// fakeTools replace the programs that a build runs. Here the namespace's root is the
// builder itself.
var fakeTools = map[string]string{
	"mmdebstrap": `#!/bin/sh -eu
if [ "$1" = --unshare-helper ]; then shift; exec "$@"; fi
for a; do case $a in --customize-hook=*) hook=${a#*=} ;; esac; done
cp "$hook" OUT/hook
root=${hook%/in/customize.sh}/root
mkdir -p "$root"
ln -s boot/vmlinuz "$root/vmlinuz"
ln -s boot/initrd.img "$root/initrd.img"
`,
	"mkfs.ext4": "#!/bin/sh\n",
	"debugfs":   "#!/bin/sh -eu\nout=${2##* }\neval head -c 2000000 /dev/zero '>'\"$out\"\n",
	"qemu-img":  "#!/bin/sh -eu\nfor last; do :; done\n[ \"$1\" != convert ] || echo disk >\"$last\"\n",
}

// attack is a script that another user of the host runs against the work directory.
const attack = `cd "$1" || exit 0
for dir in . in root root/fs; do
	ln -s "$2" $dir/disk.raw
	ln -s "$2" $dir/kernel
	echo evil >$dir/planted
done
echo evil >in/customize.sh
mv in in.old && mkdir in && echo evil >in/customize.sh && chmod 755 in/customize.sh
`

// TestBuildDirectoryIsTheUsersOwn checks that another user of the host cannot plant or
// replace anything in the directory of a build without root. As root, the test lets
// another user try. As any other user, it relies on the modes, which both variants
// check: no other user can write there.
func TestBuildDirectoryIsTheUsersOwn(t *testing.T) {
	isRoot := os.Geteuid() == 0
	builder := os.Geteuid()
	base, err := os.MkdirTemp("/tmp", "agent-image-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	if isRoot {
		builder = builderUID
	}
	file := func(name string) string { return filepath.Join(base, name) }
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Chmod(base, 0o755))
	must(os.WriteFile(file("self"), self, 0o755)) //nolint:gosec // other users run it
	must(os.Mkdir(file("bin"), 0o755))
	for name, script := range fakeTools {
		must(os.WriteFile(file("bin/"+name), []byte(strings.ReplaceAll(script, "OUT", file("out"))), 0o755)) //nolint:gosec // other users run it
	}
	for _, dir := range []string{"tmp", "home", "out"} {
		must(os.Mkdir(file(dir), 0o755))
		must(os.Chown(file(dir), builder, -1))
	}
	must(os.Chmod(file("tmp"), 0o1777))
	profile := file("home/.profile")
	must(os.WriteFile(profile, []byte("mine\n"), 0o600))
	must(os.Chown(profile, builder, -1))

	// A killed build has left a directory. This build must remove it: below, there is only one.
	for _, dir := range []string{"tmp/agent-image-dead", "tmp/agent-image-dead/root", "tmp/agent-image-dead/root/usr"} {
		must(os.Mkdir(file(dir), 0o711)) //nolint:gosec // as a build makes it
		must(os.Chown(file(dir), builder, -1))
	}
	past := time.Now().Add(-time.Hour)
	must(os.Chtimes(file("tmp/agent-image-dead"), past, past))

	cmd := exec.CommandContext(t.Context(), file("self"))
	cmd.Dir = "/"
	cmd.Env = []string{buildAsUser + "=" + file("out"), "PATH=" + file("bin") + ":/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=" + file("tmp")}
	if isRoot {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: builderUID, Gid: builderUID}}
	}
	cmd.Stderr = t.Output()
	in, err := cmd.StdinPipe()
	must(err)
	out, err := cmd.StdoutPipe()
	must(err)
	must(cmd.Start())
	steps := 0
	for lines := bufio.NewScanner(out); lines.Scan(); steps++ {
		work, err := filepath.Glob(file("tmp/agent-image-*"))
		if err != nil || len(work) != 1 {
			t.Fatalf("%s: work directories = %v, %v, want one", lines.Text(), work, err)
		}
		checkModes(t, lines.Text(), work[0], builder)
		if isRoot {
			try := exec.CommandContext(t.Context(), "/bin/sh", "-c", attack, "sh", work[0], profile)
			try.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: attackerUID, Gid: attackerUID}}
			_ = try.Run() // it is refused
		}
		_, err = io.WriteString(in, "\n")
		must(err)
	}
	if err := cmd.Wait(); err != nil || steps < 5 {
		t.Errorf("build: %v after %d lines, want success after at least 5", err, steps)
	}
	if st, err := os.Stat(profile); err != nil || st.Size() != int64(len("mine\n")) || st.Mode() != 0o600 {
		t.Errorf("the user's .profile has %d bytes and mode %v, %v; want it untouched", st.Size(), st.Mode(), err)
	}
	if hook, err := os.ReadFile(file("out/hook")); err != nil || string(hook) != customizeScript {
		t.Errorf("the hook that ran: %q, %v; want our own", hook, err)
	}
}

// checkModes fails the test if any user except the builder can write anywhere in the
// work directory, or if something in it belongs to another user.
func checkModes(t *testing.T, step, work string, builder int) {
	t.Helper()
	if st, err := os.Stat(work); err != nil || st.Mode() != fs.ModeDir|0o711 {
		t.Errorf("%s: mode of the work directory = %v, %v, want 0711", step, st.Mode(), err)
	}
	err := filepath.WalkDir(work, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(p, work)
		if uid := info.Sys().(*syscall.Stat_t).Uid; int(uid) != builder {
			t.Errorf("%s: owner of %s = user %d, want %d", step, name, uid, builder)
		}
		if d.Type() != fs.ModeSymlink && info.Mode().Perm()&0o022 != 0 {
			t.Errorf("%s: mode of %s = %v, want no write access for others", step, name, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Errorf("%s: walk %s: %v", step, work, err)
	}
}
