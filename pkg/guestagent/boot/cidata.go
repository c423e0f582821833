package boot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// cidata is the content of the VM manager's seed disk, in cloud-init's format. It
// supports only the cloud-init features that the manager uses.
type cidata struct {
	hostname string
	users    []cidataUser
	bootcmd  string // a script for /bin/sh
	timezone string
	trusted  []string // certificates in PEM form
}

type cidataUser struct {
	Name string   `yaml:"name"`
	Keys []string `yaml:"ssh-authorized-keys"`
}

const (
	cidataMount = "/mnt/lima-cidata"
	maxCidata   = 1 << 20 // bytes of user-data, more than any manager writes
)

var (
	// hostLabel matches a host name without dots, as defined by RFC 1123.
	hostLabel = lazyregexp.New(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)
	zoneName  = lazyregexp.New(`^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$`)
)

// readCidata reads the seed disk mounted at dir.
func readCidata(dir string) (cidata, error) {
	var c cidata
	meta, err := readSmall(filepath.Join(dir, "meta-data"))
	if err != nil {
		return c, err
	}
	if c.hostname, err = parseMetaData(meta); err != nil {
		return c, err
	}
	user, err := readSmall(filepath.Join(dir, "user-data"))
	if err != nil {
		return c, err
	}
	return c, c.parseUserData(user)
}

// findCidata returns the path of the seed disk in dev: a CD drive under QEMU, and a read-only disk with
// the volume identifier "cidata" (ISO 9660, section 8.4.7) under Virtualization.framework. blocks is
// /sys/class/block. Guests can write to all other disks, so only a read-only one is trusted.
func findCidata(dev, blocks string) (string, error) {
	drive := filepath.Join(dev, "sr0")
	if _, err := os.Stat(drive); err == nil {
		return drive, nil
	}
	disks, err := filepath.Glob(filepath.Join(dev, "vd[a-z]"))
	if err != nil {
		return "", err
	}
	for _, disk := range disks {
		if sys.Text(filepath.Join(blocks, filepath.Base(disk), "ro")) == "1\n" && volumeID(disk) == "cidata" {
			return disk, nil
		}
	}
	return "", fmt.Errorf("find the seed disk: %w", os.ErrNotExist)
}

// volumeID returns the identifier of an ISO 9660 file system, "" if there is none.
func volumeID(disk string) string {
	f, err := os.Open(disk)
	if err != nil {
		return ""
	}
	defer f.Close()
	volume := make([]byte, 72) // the start of the primary volume descriptor
	if _, err := f.ReadAt(volume, 16*2048); err != nil || string(volume[:6]) != "\x01CD001" {
		return ""
	}
	return strings.TrimRight(string(volume[40:]), " \x00")
}

func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxCidata+1))
	if err == nil && len(data) > maxCidata {
		err = fmt.Errorf("%s: over %d bytes", path, maxCidata)
	}
	return data, err
}

func parseMetaData(data []byte) (string, error) {
	var m struct {
		Hostname string `yaml:"local-hostname"`
	}
	if err := yaml.Unmarshal(data, &m); err != nil {
		return "", errors.New("meta-data is not YAML")
	}
	if !hostLabel.MatchString(m.Hostname) {
		return "", errors.New("meta-data has no host name")
	}
	return m.Hostname, nil
}

// parseUserData rejects keys that it does not know: a machine that silently lacks
// part of its configuration is worse than one that does not start.
func (c *cidata) parseUserData(data []byte) error {
	if first, _, _ := bytes.Cut(data, []byte("\n")); strings.TrimSpace(string(first)) != "#cloud-config" {
		return errors.New("user-data is not #cloud-config")
	}
	var u struct {
		Users    []cidataUser `yaml:"users"`
		Bootcmd  []any        `yaml:"bootcmd"`
		Timezone string       `yaml:"timezone"`
		CACerts  struct {
			RemoveDefaults bool     `yaml:"remove_defaults"`
			Trusted        []string `yaml:"trusted"`
		} `yaml:"ca_certs"`
	}
	var all map[string]any
	if err := errors.Join(yaml.Unmarshal(data, &u), yaml.Unmarshal(data, &all)); err != nil {
		return errors.New("user-data must have the form that a VM manager writes") // the YAML error would quote the data
	}
	known := []string{
		"users", "bootcmd", "timezone", "ca_certs",
		// The guest program, or another part of the boot, does the work of these
		// keys in any case.
		"growpart", "write_files", "manage_resolv_conf", "resolv_conf",
	}
	for key, value := range all {
		if value != nil && !slices.Contains(known, key) { // Lima writes an empty "mounts"
			return fmt.Errorf("user-data has %.40q, which requires cloud-init", key)
		}
	}
	switch {
	case u.CACerts.RemoveDefaults:
		return errors.New("user-data has ca_certs.remove_defaults, which requires cloud-init")
	case u.Timezone != "" && !zoneName.MatchString(u.Timezone):
		return errors.New("user-data: invalid timezone")
	}
	c.users, c.timezone, c.trusted = u.Users, u.Timezone, u.CACerts.Trusted
	var err error
	c.bootcmd, err = shellify(u.Bootcmd)
	return err
}

// shellify converts bootcmd's items into one script, as cloud-init does: a string
// is shell code, a list is one command whose words are quoted.
func shellify(items []any) (string, error) {
	if len(items) == 0 {
		return "", nil
	}
	b := strings.Builder{}
	b.WriteString("#!/bin/sh\n")
	for i, item := range items {
		switch item := item.(type) {
		case string:
			b.WriteString(item)
		case []any:
			for n, word := range item {
				if n > 0 {
					b.WriteByte(' ')
				}
				b.WriteString("'" + strings.ReplaceAll(fmt.Sprint(word), "'", `'\''`) + "'")
			}
		default:
			return "", fmt.Errorf("user-data: bootcmd[%d] must be text or a list", i)
		}
		b.WriteByte('\n')
	}
	if s := b.String(); !strings.ContainsRune(s, 0) {
		return s, nil
	}
	return "", errors.New("user-data: bootcmd contains a zero byte")
}

// provisions reports whether the VM manager's own boot script has work to do.
func provisions(dir string) bool {
	found, err := filepath.Glob(filepath.Join(dir, "provision.*"))
	return err == nil && len(found) > 0
}

// hostsFile returns the content of /etc/hosts with the machine's own name added, so
// that the name is never looked up in the network. It removes the previous name.
func hostsFile(old, name string) string {
	var b strings.Builder
	for line := range strings.Lines(old) {
		if f := strings.Fields(line); len(f) == 0 || f[0] != "127.0.1.1" {
			b.WriteString(strings.TrimRight(line, "\n") + "\n")
		}
	}
	b.WriteString("127.0.1.1 " + name + "\n")
	return b.String()
}

// keysFile returns the content of an authorized_keys file: one key per line and
// nothing else.
func keysFile(keys []string) (string, error) {
	var b strings.Builder
	for _, k := range keys {
		if k = strings.TrimSpace(k); strings.ContainsAny(k, "\r\n\x00") {
			return "", errors.New("an authorized key must be one line")
		}
		b.WriteString(k + "\n")
	}
	return b.String(), nil
}

// account is a user in /etc/passwd.
type account struct {
	uid, gid int
	home     string
}

// findAccount looks up a user without the C library.
func findAccount(g sys.Guest, name string) (account, error) {
	for line := range strings.Lines(g.Text("/etc/passwd")) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) != 7 || f[0] != name {
			continue
		}
		var a account
		if _, err := fmt.Sscan(f[2]+" "+f[3], &a.uid, &a.gid); err != nil || !filepath.IsAbs(f[5]) {
			break
		}
		a.home = f[5]
		return a, nil
	}
	return account{}, fmt.Errorf("no user %.40q", name)
}

// place writes a file unless it already holds the data. It does not sync: a caller that
// places several files syncs once, after the last.
func place(g sys.Guest, path, data string, mode os.FileMode) error {
	path = g.Path(path)
	if old, err := os.ReadFile(path); err == nil && string(old) == data {
		return nil
	}
	return sys.WriteUnflushed(path, []byte(data), mode)
}
