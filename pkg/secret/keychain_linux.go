package secret

import (
	"errors"
	"fmt"
	"strings"

	"github.com/godbus/dbus/v5"
)

// storeInKeychain is the command that stores an entry.
const storeInKeychain = "secret-tool store --label=%[1]s service %[1]s username %[2]s"

const unlockHint = "seahorse # unlock the keyring, or log in to the desktop"

// findKeychain checks that there is a D-Bus session bus. Otherwise the library would start one,
// on which no Secret Service has the user's entries.
func findKeychain() error {
	conn, err := dbus.SessionBusPrivateNoAutoStartup()
	if err != nil {
		return fmt.Errorf("the D-Bus session bus cannot be reached, and with it no keychain: %w", err)
	}
	return conn.Close()
}

// describeKeychain returns the message for an error of the Secret Service.
func describeKeychain(err error) (message, hint string) {
	refused, _ := errors.AsType[dbus.Error](err)
	switch refused.Name {
	case "org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner":
		return "no Secret Service (GNOME Keyring, KWallet, KeePassXC) runs on the D-Bus session bus", "gnome-keyring-daemon --start --components=secrets"
	case "org.freedesktop.Secret.Error.IsLocked":
		return "the keychain is locked", unlockHint
	}
	if strings.HasPrefix(err.Error(), "failed to unlock") { // the library's text for a refused prompt
		return "the keychain is locked", unlockHint
	}
	return strings.TrimSpace(refused.Name + " " + err.Error()), ""
}
