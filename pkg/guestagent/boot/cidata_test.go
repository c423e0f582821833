package boot

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// limaUserData is what Lima 1.2 writes for a plain VM with a boot script.
const limaUserData = `#cloud-config
# vim:syntax=yaml

growpart:
  mode: auto
  devices: ['/']
mounts:
timezone: Europe/Berlin

users:
  - name: "agent"
    uid: "1000"
    gecos: "agent"
    homedir: "/home/agent"
    shell: /bin/bash
    sudo: ALL=(ALL) NOPASSWD:ALL
    lock_passwd: true
    ssh-authorized-keys:
      - "ssh-ed25519 AAAA lima"
write_files:
 - content: |
      #!/bin/sh
      exec "${LIMA_CIDATA_MNT}"/boot.sh
   owner: root:root
   path: /var/lib/cloud/scripts/per-boot/00-lima.boot.sh
   permissions: '0755'

manage_resolv_conf: true

resolv_conf:
  nameservers:
  - 192.168.5.3
bootcmd:
- |
  # We need to embed the params.env as a here-doc because /mnt/lima-cidata is not yet mounted
  while read -r line; do [ -n "$line" ] && export "$line"; done <<'EOF'
  PARAM_A=it's "b"
  EOF
  echo "one $PARAM_A"
- [echo, "two  words", 3, "it's"]
`

func TestUserDataOfLima(t *testing.T) {
	var c cidata
	if err := c.parseUserData([]byte(limaUserData)); err != nil {
		t.Fatal(err)
	}
	if c.timezone != "Europe/Berlin" || len(c.users) != 1 || c.users[0].Name != "agent" || len(c.users[0].Keys) != 1 {
		t.Fatalf("parseUserData: %+v, want zone Europe/Berlin and user agent with one key", c)
	}
	// Items form one script, in order, as cloud-init runs them.
	path := filepath.Join(t.TempDir(), "bootcmd")
	if err := os.WriteFile(path, []byte(c.bootcmd), 0o700); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "/bin/sh", path).CombinedOutput()
	if want := "one it's \"b\"\ntwo  words 3 it's\n"; err != nil || string(out) != want {
		t.Fatalf("bootcmd printed %q, %v, want %q", out, err, want)
	}
}

func TestUserDataThatIsRefused(t *testing.T) {
	for what, text := range map[string]string{
		"no header":      "bootcmd: [a]\n",
		"a script":       "#!/bin/sh\nreboot\n",
		"not YAML":       "#cloud-config\nbootcmd: [\n",
		"unknown":        "#cloud-config\nruncmd: [reboot]\n",
		"packages":       "#cloud-config\npackage_update: true\n",
		"mounts":         "#cloud-config\nmounts: [[a, b]]\n",
		"a map":          "#cloud-config\nbootcmd: [{a: b}]\n",
		"a number":       "#cloud-config\nbootcmd: 3\n",
		"bad zone":       "#cloud-config\ntimezone: ../../etc/shadow\n",
		"zone by root":   "#cloud-config\ntimezone: /etc/shadow\n",
		"no defaults":    "#cloud-config\nca_certs: {remove_defaults: true}\n",
		"a zero byte":    "#cloud-config\nbootcmd: [\"a\\0b\"]\n",
		"nothing at all": "",
	} {
		var c cidata
		if err := c.parseUserData([]byte(text)); err == nil {
			t.Errorf("%s: parseUserData(%q) accepted it as %+v, want an error", what, text, c)
		}
	}
}

func TestMetaData(t *testing.T) {
	name, err := parseMetaData([]byte("instance-id: iid-1\nlocal-hostname: lima-a1\n"))
	if err != nil || name != "lima-a1" {
		t.Fatalf("parseMetaData() = %q, %v, want %q", name, err, "lima-a1")
	}
	for _, bad := range []string{"", "instance-id: a\n", "local-hostname: -a\n", "local-hostname: a/b\n", "local-hostname: [a]\n", "local-hostname: " + strings.Repeat("a", 64), "{"} {
		if name, err := parseMetaData([]byte(bad)); err == nil {
			t.Errorf("parseMetaData(%q) = %q, want an error", bad, name)
		}
	}
}

func TestASeedDiskIsReadWithABound(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("meta-data", "local-hostname: lima-a\n")
	write("user-data", limaUserData)
	if c, err := readCidata(dir); err != nil || c.hostname != "lima-a" || c.bootcmd == "" {
		t.Fatalf("readCidata() = %+v, %v, want hostname %q and a bootcmd", c, err, "lima-a")
	}
	write("user-data", limaUserData+strings.Repeat("#", maxCidata))
	if _, err := readCidata(dir); err == nil {
		t.Fatalf("readCidata of user-data over %d bytes succeeded, want an error", maxCidata)
	}
	if provisions(dir) {
		t.Fatal("provisions() without scripts = true, want false")
	}
	if err := os.Mkdir(filepath.Join(dir, "provision.system"), 0o700); err != nil {
		t.Fatal(err)
	}
	if !provisions(dir) {
		t.Fatal("provisions() with provision.system = false, want true")
	}
}

func TestHostsFile(t *testing.T) {
	const before = "127.0.0.1 localhost\n127.0.1.1 old\n::1 ip6-localhost\n10.0.0.1 other"
	const want = "127.0.0.1 localhost\n::1 ip6-localhost\n10.0.0.1 other\n127.0.1.1 new\n"
	if got := hostsFile(before, "new"); got != want {
		t.Fatalf("hostsFile(%q, %q) = %q, want %q", before, "new", got, want)
	}
	if got := hostsFile(want, "new"); got != want {
		t.Fatalf("hostsFile of its own result = %q, want %q", got, want)
	}
}

func TestAHostKeyIsMadeOnce(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	first, err := ensureHostKey(g)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ensureHostKey(g); err != nil || again != first {
		t.Fatalf("second ensureHostKey() = %q, %v, want %q", again, err, first)
	}
	info, err := os.Stat(g.Path(hostKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o600 {
		t.Fatalf("mode of the host key = %v, want %v", got, os.FileMode(0o600))
	}
	if got := g.Text(hostKeyFile + ".pub"); got != first+"\n" {
		t.Fatalf("public half = %q, want %q", got, first+"\n")
	}
	// A key that was truncated by a power failure is replaced.
	if err := os.WriteFile(g.Path(hostKeyFile), []byte("-----BEGIN OPENSSH"), 0o600); err != nil {
		t.Fatal(err)
	}
	if second, err := ensureHostKey(g); err != nil || second == first {
		t.Fatalf("ensureHostKey() with a truncated key = %q, %v, want another key than %q", second, err, first)
	}
}

func TestLoginKeys(t *testing.T) {
	const key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ+cSFdCrF0rLFtdxTdpHR2DPjPBTYXZfJoTJ7gvRPAL"
	if got, err := loginKey(key + " a comment\n"); err != nil || got != key {
		t.Fatalf("loginKey(%q) = %q, %v, want %q", key+" a comment\n", got, err, key)
	}
	for _, bad := range []string{"", "ssh-ed25519 AAAA", "command=\"sh\" " + key, key + "\n" + key} {
		if got, err := loginKey(bad); err == nil {
			t.Errorf("loginKey(%q) = %q, want an error", bad, got)
		}
	}
	if _, err := keysFile([]string{key, key + "\n" + key}); err == nil {
		t.Error("keysFile with a key of two lines succeeded, want an error")
	}
}

func TestAllow(t *testing.T) {
	const key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ+cSFdCrF0rLFtdxTdpHR2DPjPBTYXZfJoTJ7gvRPAL"
	const both = key + "\ncert-authority " + key + "\n"
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	if err := AllowCertificates(g); err != nil {
		t.Errorf("AllowCertificates without login keys = %v, want nil", err)
	}
	if err := allow(g, "agent", key); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		t.Helper()
		text, err := os.ReadFile(g.Path(loginKeys + "/" + name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if got := read("agent"); got != both {
		t.Errorf("login keys = %q, want %q", got, both)
	}
	// What an earlier version wrote, and what is none of ours.
	for name, text := range map[string]string{"old": key + "\n", "foreign": "command=\"sh\" " + key + "\n", "two": key + "\n" + key + "\n", "empty": ""} {
		if err := os.WriteFile(g.Path(loginKeys+"/"+name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := AllowCertificates(g); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"agent": both, "old": both, "foreign": "command=\"sh\" " + key + "\n", "two": key + "\n" + key + "\n", "empty": ""} {
		if got := read(name); got != want {
			t.Errorf("login keys of %s = %q, want %q", name, got, want)
		}
	}
}

func FuzzUserData(f *testing.F) {
	f.Add([]byte(limaUserData))
	f.Add([]byte("#cloud-config\nbootcmd: [[a, [b]], c]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c cidata
		if err := c.parseUserData(data); err != nil {
			return
		}
		if strings.ContainsRune(c.bootcmd, 0) || c.timezone != "" && strings.Contains("/"+c.timezone+"/", "/../") {
			t.Fatalf("parseUserData(%q) accepted bootcmd %q, timezone %q, want no zero byte and no path", data, c.bootcmd, c.timezone)
		}
	})
}

// Under Virtualization.framework, the seed disk is a virtio disk. One that an earlier guest could write to
// must not be taken for it.
func TestFindCidata(t *testing.T) {
	volume := func(id string) []byte {
		iso := make([]byte, 17*2048)
		copy(iso[16*2048:], "\x01CD001\x01")
		copy(iso[16*2048+40:], id+strings.Repeat(" ", 32-len(id)))
		return iso
	}
	machine := func(t *testing.T, disks map[string][]byte, readOnly ...string) (found string, err error) {
		t.Helper()
		dev, blocks := t.TempDir(), t.TempDir()
		for name, data := range disks {
			ro := "0\n"
			if slices.Contains(readOnly, name) {
				ro = "1\n"
			}
			if err := errors.Join(os.WriteFile(filepath.Join(dev, name), data, 0o600), os.Mkdir(filepath.Join(blocks, name), 0o700),
				os.WriteFile(filepath.Join(blocks, name, "ro"), []byte(ro), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		found, err = findCidata(dev, blocks)
		return filepath.Base(found), err
	}
	root, seed := make([]byte, 40*1024), volume("cidata")
	if got, err := machine(t, map[string][]byte{"vda": root, "vdb": volume("other"), "vdc": seed, "vdd": nil}, "vdb", "vdc", "vdd"); err != nil || got != "vdc" {
		t.Errorf("findCidata = %q, %v, want vdc", got, err)
	}
	if got, err := machine(t, map[string][]byte{"vda": root, "sr0": seed}, "sr0"); err != nil || got != "sr0" {
		t.Errorf("findCidata with a CD drive = %q, %v, want sr0", got, err)
	}
	if got, err := machine(t, map[string][]byte{"vda": root, "vdb": seed}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("findCidata with a writable seed = %q, %v, want that there is none", got, err)
	}
}
